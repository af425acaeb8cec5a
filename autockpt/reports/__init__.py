"""What people read: reports, tables, timelines and pictures of plans and steps."""
