"""How large a step training can take: the sharpness that an optimizer sees."""
