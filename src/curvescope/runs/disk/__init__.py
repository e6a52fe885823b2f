"""What comes to the disk: whether it can, in which order, and products one by one."""
