"""The viewer's page as one file: some episodes, thinned, with what was found, and everything that shows them."""
