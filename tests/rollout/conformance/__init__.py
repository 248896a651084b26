"""A package, so that its engines end with its tests, and what later tests leave running is not put down to them."""
