"""Copies of rows of bytes by index lists: units and pages of the arena."""
