"""The one place for Ray Serve's alpha APIs: request routers, autoscaling policies, placement groups."""
