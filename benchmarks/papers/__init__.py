"""The papers' tables, one module each: every row of a table runs one configuration."""
