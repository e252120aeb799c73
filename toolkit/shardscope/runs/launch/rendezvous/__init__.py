"""How ranks find each other: the stores of one machine and of several nodes, and the groups of gloo."""
