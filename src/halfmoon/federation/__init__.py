"""A federation over a network: the messages, the server and the sites. No image is ever sent."""
