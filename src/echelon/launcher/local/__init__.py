"""The processes of this machine: an elastic agent, ranks forked from a server, their places, output and ends."""
