"""Make the cases of the test kit from the page of the formats alone."""
