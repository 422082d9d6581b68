"""What every rank does for one check, and what it reports: plain data, judged once all ranks have reported."""
