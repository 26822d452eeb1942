"""Published training runs, and the constants of the cost model that are fitted to them."""
