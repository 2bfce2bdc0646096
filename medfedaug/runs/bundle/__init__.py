"""A finished run as a MONAI Bundle, which needs only MONAI."""
