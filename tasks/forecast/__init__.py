"""What a night would do and how long it would take, before it runs."""
