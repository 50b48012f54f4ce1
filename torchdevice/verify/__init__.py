"""``verify=``: runs each operator of the target on the CPU too, and says where the results differ."""
