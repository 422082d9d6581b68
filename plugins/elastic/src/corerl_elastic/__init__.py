"""CoreRL's runs on more or fewer devices: resized by command or by a scaler, and continued when machines are lost."""
