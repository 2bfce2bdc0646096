"""Whatever server, site, planning and secure aggregation share."""
