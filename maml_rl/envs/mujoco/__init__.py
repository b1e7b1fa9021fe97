"""Families on MuJoCo models."""
