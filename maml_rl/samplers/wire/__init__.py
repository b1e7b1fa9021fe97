"""What both sides of the process boundary share: messages, shared memory, and words for both."""
