#include "library.hpp"

namespace mooncake::verbs {

Status Verbs::load(const std::string& path) {
  const char* remedy = "install libibverbs (Debian: libibverbs1 and ibverbs-providers)";
  Status status = path.empty() ? library_.open({"libibverbs.so.1"}, remedy)
                               : library_.open({path.c_str()}, "correct the option 'library'");
  auto need = [&](const char* symbol, auto* function) {
    if (status.ok()) status = library_.require(symbol, function);
  };
  need("ibv_get_device_list", &get_device_list);
  need("ibv_free_device_list", &free_device_list);
  need("ibv_get_device_name", &get_device_name);
  need("ibv_open_device", &open_device);
  need("ibv_close_device", &close_device);
  need("ibv_query_device", &query_device);
  need("ibv_query_port", &query_port);
  need("ibv_query_gid", &query_gid);
  need("ibv_get_async_event", &get_async_event);
  need("ibv_ack_async_event", &ack_async_event);
  need("ibv_alloc_pd", &alloc_pd);
  need("ibv_dealloc_pd", &dealloc_pd);
  need("ibv_reg_mr", &reg_mr);
  need("ibv_dereg_mr", &dereg_mr);
  need("ibv_create_comp_channel", &create_comp_channel);
  need("ibv_destroy_comp_channel", &destroy_comp_channel);
  need("ibv_create_cq", &create_cq);
  need("ibv_destroy_cq", &destroy_cq);
  need("ibv_get_cq_event", &get_cq_event);
  need("ibv_ack_cq_events", &ack_cq_events);
  need("ibv_create_qp", &create_qp);
  need("ibv_modify_qp", &modify_qp);
  need("ibv_destroy_qp", &destroy_qp);
  need("ibv_wc_status_str", &wc_status_str);
  if (!status.ok()) return status;
  library_.find("ibv_fork_init", &fork_init);
  library_.find("_ibv_query_gid_table", &query_gid_table);
  library_.find("ibv_reg_mr_iova2", &reg_mr_iova2);
  library_.find("ibv_reg_dmabuf_mr", &reg_dmabuf_mr);
  // Without it a fork() of the application would move registered pages away from the device on old kernels.
  if (fork_init != nullptr) fork_init();
  return {};
}

Status Verbs::get(const std::string& path, const Verbs** verbs) { return driver::loaded_once(path, verbs); }

}  // namespace mooncake::verbs
