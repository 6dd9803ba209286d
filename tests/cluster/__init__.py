"""Several machines: `machines.py` makes them out of the namespaces of this one."""
