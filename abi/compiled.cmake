# How compiled parts of this project are built: found through MC_ABI_DIR, so also in an sdist and in a driver of
# its own repository.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
find_package(Threads REQUIRED)

# Headers take most of the time of compiling: several sources at once are a third of the work. Names in their
# anonymous namespaces must differ.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

# mooncake_add_module(NAME FOLDER SOURCES...): a module for the Python package's folder FOLDER ("." is its root).
# MC_COMPILED is a folder that has it already, as `.ci/wheels.py --as-installed` gives it; then nothing is compiled.
function(mooncake_add_module name folder)
  if(MC_COMPILED)
    install(FILES "${MC_COMPILED}/${folder}/${name}.abi3.so" DESTINATION "${folder}")
    return()
  endif()
  nanobind_add_module(${name} NB_DOMAIN mooncake BACKEND_MODULE nanobind_backend ${ARGN})
  target_include_directories(${name} PRIVATE "${MC_ABI_DIR}")
  target_compile_options(${name} PRIVATE -Wall -Wextra -O2)
  target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  install(TARGETS ${name} LIBRARY DESTINATION "${folder}")
endfunction()

# mooncake_add_core([SHARED FOLDERS...] [SOURCES...]): _core of every source in core/ and in these folders of
# abi/support, and of the sources named.
function(mooncake_add_core)
  cmake_parse_arguments(PARSE_ARGV 0 core "" "" "SHARED")
  file(GLOB sources CONFIGURE_DEPENDS core/*.cpp)
  foreach(folder IN LISTS core_SHARED)
    file(GLOB shared CONFIGURE_DEPENDS "${MC_ABI_DIR}/support/${folder}/*.cpp")
    list(APPEND sources ${shared})
  endforeach()
  mooncake_add_module(_core . ${sources} ${core_UNPARSED_ARGUMENTS})
endfunction()
