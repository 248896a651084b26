"""Will speculation pay here, and at what depth? Predicted from shapes and spec sheets, or from measured steps."""
