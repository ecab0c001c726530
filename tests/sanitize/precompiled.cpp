// Owns the precompiled header that the cores share; see CMakeLists.txt.
