"""What each step computes: requests, their states and queues, KV admission, the step's token batch."""
