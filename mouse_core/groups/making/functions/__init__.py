"""What rollouts are worth, which are kept, and which are drawn: functions of what is known of all of them."""
