"""The families whose dynamics MuJoCo computes."""
