"""Full attention: keys and values of every token, in pages."""
