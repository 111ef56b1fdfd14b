"""Engine processes beside this one."""
