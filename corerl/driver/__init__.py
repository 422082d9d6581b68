"""What the loop calls on the driver: a run's parts, assembled, told what to do, and taken apart."""
