# Target amx_sft_moe::onednn: amx_sft_moe::amx_sft_moe and oneDNN, for kernels/onednn.hpp. Part of the project's
# own build and of the installed CMake package.
#
#   AMX_SFT_MOE_ONEDNN       AUTO: where oneDNN is found; ON: an error where it is not; OFF: never
#   AMX_SFT_MOE_ONEDNN_ROOT  a prefix with include/ and lib/; else the system's
#
# Header and library are looked for by name: Debian's package files (libdnnl-dev) want OpenCL's development
# files.
set(AMX_SFT_MOE_ONEDNN AUTO CACHE STRING "Kernel onednn: AUTO, ON or OFF")
set(AMX_SFT_MOE_ONEDNN_ROOT "" CACHE PATH "Prefix of oneDNN, where it is not the system's")
set_property(CACHE AMX_SFT_MOE_ONEDNN PROPERTY STRINGS AUTO ON OFF)

if(NOT TARGET amx_sft_moe::onednn AND NOT AMX_SFT_MOE_ONEDNN STREQUAL "OFF")
  find_path(AMX_SFT_MOE_ONEDNN_INCLUDE dnnl.hpp HINTS "${AMX_SFT_MOE_ONEDNN_ROOT}/include")
  find_library(AMX_SFT_MOE_ONEDNN_LIBRARY dnnl HINTS "${AMX_SFT_MOE_ONEDNN_ROOT}/lib")
  mark_as_advanced(AMX_SFT_MOE_ONEDNN_INCLUDE AMX_SFT_MOE_ONEDNN_LIBRARY)
  if(AMX_SFT_MOE_ONEDNN_INCLUDE AND AMX_SFT_MOE_ONEDNN_LIBRARY)
    add_library(amx_sft_moe_onednn INTERFACE IMPORTED)
    target_include_directories(amx_sft_moe_onednn SYSTEM INTERFACE "${AMX_SFT_MOE_ONEDNN_INCLUDE}")
    target_link_libraries(amx_sft_moe_onednn INTERFACE amx_sft_moe::amx_sft_moe "${AMX_SFT_MOE_ONEDNN_LIBRARY}")
    add_library(amx_sft_moe::onednn ALIAS amx_sft_moe_onednn)
  elseif(AMX_SFT_MOE_ONEDNN STREQUAL "ON")
    message(FATAL_ERROR
      "AMX_SFT_MOE_ONEDNN=ON: expected dnnl.hpp and libdnnl (Debian: libdnnl-dev; or AMX_SFT_MOE_ONEDNN_ROOT), "
      "got ${AMX_SFT_MOE_ONEDNN_INCLUDE} and ${AMX_SFT_MOE_ONEDNN_LIBRARY}")
  endif()
endif()
