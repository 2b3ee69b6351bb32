"""What `quintet bench` is made of: requests to send, clients that send them, and what is said about the answers."""
