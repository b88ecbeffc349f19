"""What computes a rank's experts on the rows that a dispatcher brought; `backend` is the contract that all keep."""
