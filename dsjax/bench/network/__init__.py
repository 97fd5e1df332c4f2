"""`dsjax bench network`: the collectives that a step sends, timed on the links of a mesh and held against what a cluster should do."""
