"""Replicas of an engine in processes of Ray Serve, and streams that survive the loss of one."""
