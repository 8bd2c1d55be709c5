"""Replicas of an engine in processes of Ray Serve, and streams that continue when one is lost."""
