"""Make the cases of the test kit from only the page of the formats."""
