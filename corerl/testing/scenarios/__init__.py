"""What every rank does for one check, and what it reports: plain data, judged where all reports come together."""
