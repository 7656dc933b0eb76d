"""What the server tells its operators beside metrics: log lines and traces. No Ray, no torch, no HTTP."""
