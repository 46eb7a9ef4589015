"""What people use now, each in its fastest documented way, on the same data and windows."""
