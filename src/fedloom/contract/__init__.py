"""``check_method``: a test of the promises of a method."""
