"""What papers print, as they print it and put right: Kronecker forms, theorems and bounds to compare with."""
