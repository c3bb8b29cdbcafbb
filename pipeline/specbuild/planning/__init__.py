"""The planner's own parts: formulas, hardware, memory, speed, measurements and the picture. Nothing else imports them."""
