"""The parts of `quintet bench`: requests to send, clients that send them, reports on the answers."""
