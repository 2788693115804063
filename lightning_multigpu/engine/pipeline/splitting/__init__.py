"""Which layers a pipeline has, where they are cut, and which rank holds which tensor."""
