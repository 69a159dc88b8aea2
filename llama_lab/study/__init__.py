"""Designs, plans and their execution."""
