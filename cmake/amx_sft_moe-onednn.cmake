# Target amx_sft_moe::onednn: amx_sft_moe::amx_sft_moe and oneDNN, for kernels/onednn.hpp. Part of the project's
# own build and of the installed CMake package.
#
#   AMX_SFT_MOE_ONEDNN       AUTO: where oneDNN is found; ON: an error where it is not; OFF: never
#   AMX_SFT_MOE_ONEDNN_ROOT  a prefix with include/ and lib/, where alone it is looked for: an error where it is not
#                            there; else the system's
#
# Header and library are looked for by name: Debian's package files (libdnnl-dev) want OpenCL's development
# files.
cmake_policy(VERSION 3.24) # and not what the oldest CMake of who calls find_package did with variables
set(AMX_SFT_MOE_ONEDNN AUTO CACHE STRING "Kernel onednn: AUTO, ON or OFF")
set(AMX_SFT_MOE_ONEDNN_ROOT "" CACHE PATH "Prefix of oneDNN, where it is not the system's")
set_property(CACHE AMX_SFT_MOE_ONEDNN PROPERTY STRINGS AUTO ON OFF)

# What was found must fit (arch/onednn/matmul.hpp): version 2.6 or later, and a CPU runtime of OpenMP or none.
# A function, for its variables would otherwise be those of whoever calls find_package.
function(_amx_sft_moe_onednn_fits include result)
  set(found "")
  foreach(header dnnl_version.h dnnl_config.h oneapi/dnnl/dnnl_version.h oneapi/dnnl/dnnl_config.h)
    if(EXISTS "${include}/${header}")
      file(STRINGS "${include}/${header}" lines REGEX "define DNNL_(VERSION_M|CPU_THREADING_RUNTIME)")
      string(APPEND found "${lines};")
    endif()
  endforeach()
  string(REGEX MATCH "DNNL_VERSION_MAJOR +([0-9]+)" _ "${found}")
  set(version "${CMAKE_MATCH_1}")
  string(REGEX MATCH "DNNL_VERSION_MINOR +([0-9]+)" _ "${found}")
  set(version "${version}.${CMAKE_MATCH_1}")
  if(version VERSION_GREATER_EQUAL 2.6 AND found MATCHES "CPU_THREADING_RUNTIME +DNNL_RUNTIME_(OMP|SEQ)")
    set(${result} TRUE PARENT_SCOPE)
  else()
    message(STATUS "oneDNN in ${include} (${version}) does not fit kernel onednn: expected 2.6 or later with the CPU "
                   "runtime OMP or SEQ")
  endif()
endfunction()

# Looks for header and library and sets ${fits} to whether they are there and fit.
function(_amx_sft_moe_find_onednn fits)
  # What was found under another prefix, or without one, stays in the cache.
  if(NOT "${AMX_SFT_MOE_ONEDNN_ROOT_SEARCHED}" STREQUAL "${AMX_SFT_MOE_ONEDNN_ROOT}")
    unset(AMX_SFT_MOE_ONEDNN_INCLUDE CACHE)
    unset(AMX_SFT_MOE_ONEDNN_LIBRARY CACHE)
    set(AMX_SFT_MOE_ONEDNN_ROOT_SEARCHED "${AMX_SFT_MOE_ONEDNN_ROOT}" CACHE INTERNAL "")
  endif()
  set(where "")
  if(AMX_SFT_MOE_ONEDNN_ROOT)
    set(where PATHS "${AMX_SFT_MOE_ONEDNN_ROOT}" NO_DEFAULT_PATH)
  endif()
  find_path(AMX_SFT_MOE_ONEDNN_INCLUDE dnnl.hpp ${where} PATH_SUFFIXES include)
  find_library(AMX_SFT_MOE_ONEDNN_LIBRARY dnnl ${where} PATH_SUFFIXES lib lib64 lib/${CMAKE_LIBRARY_ARCHITECTURE})
  mark_as_advanced(AMX_SFT_MOE_ONEDNN_INCLUDE AMX_SFT_MOE_ONEDNN_LIBRARY)
  set(found FALSE)
  if(AMX_SFT_MOE_ONEDNN_INCLUDE AND AMX_SFT_MOE_ONEDNN_LIBRARY)
    _amx_sft_moe_onednn_fits("${AMX_SFT_MOE_ONEDNN_INCLUDE}" found)
  endif()
  set(${fits} ${found} PARENT_SCOPE)
endfunction()

# OFF, and whatever else is false to CMake: NO, 0, FALSE, ...
if(AMX_SFT_MOE_ONEDNN AND NOT TARGET amx_sft_moe::onednn)
  _amx_sft_moe_find_onednn(AMX_SFT_MOE_ONEDNN_FITS)
  if(AMX_SFT_MOE_ONEDNN_FITS)
    add_library(amx_sft_moe_onednn INTERFACE IMPORTED GLOBAL)
    target_include_directories(amx_sft_moe_onednn SYSTEM INTERFACE "${AMX_SFT_MOE_ONEDNN_INCLUDE}")
    target_link_libraries(amx_sft_moe_onednn INTERFACE amx_sft_moe::amx_sft_moe "${AMX_SFT_MOE_ONEDNN_LIBRARY}")
    add_library(amx_sft_moe::onednn ALIAS amx_sft_moe_onednn)
  elseif(AMX_SFT_MOE_ONEDNN_ROOT OR NOT AMX_SFT_MOE_ONEDNN STREQUAL "AUTO")
    message(FATAL_ERROR
      "AMX_SFT_MOE_ONEDNN=${AMX_SFT_MOE_ONEDNN}, AMX_SFT_MOE_ONEDNN_ROOT=${AMX_SFT_MOE_ONEDNN_ROOT}: expected dnnl.hpp "
      "and libdnnl that fit (Debian: libdnnl-dev; or AMX_SFT_MOE_ONEDNN_ROOT), got ${AMX_SFT_MOE_ONEDNN_INCLUDE} and "
      "${AMX_SFT_MOE_ONEDNN_LIBRARY}")
  endif()
endif()

# find_package(amx_sft_moe COMPONENTS onednn)
foreach(_amx_sft_moe_component IN LISTS amx_sft_moe_FIND_COMPONENTS)
  if(_amx_sft_moe_component STREQUAL "onednn" AND TARGET amx_sft_moe::onednn)
    set(amx_sft_moe_onednn_FOUND TRUE)
  elseif(amx_sft_moe_FIND_REQUIRED_${_amx_sft_moe_component})
    set(amx_sft_moe_FOUND FALSE)
    string(CONCAT amx_sft_moe_NOT_FOUND_MESSAGE "expected no component but onednn, which is there where oneDNN is found, "
                                                "got ${_amx_sft_moe_component}")
  endif()
endforeach()
unset(_amx_sft_moe_component)
