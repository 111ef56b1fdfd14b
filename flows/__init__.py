"""What runs: each flow reads like the picture of what it does."""
