"""The server of a federation: sessions with sites, checks of their replies, rounds over the network."""
