"""One step of a flow each: open artifacts, call one pure function, return a small reference."""
