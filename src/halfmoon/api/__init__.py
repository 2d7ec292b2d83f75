"""Types that the author of a method imports: Method, ClientUpdate, Federation, Batch and the types of their fields."""
