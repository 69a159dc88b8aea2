"""What every room may use, and knows none of them."""
