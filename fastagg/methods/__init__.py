"""One file per aggregation method. A method is arithmetic on a Gram; it never touches a parameter."""
