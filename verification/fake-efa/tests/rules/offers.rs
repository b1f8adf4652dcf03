//! What `fi_getinfo` offers, and to whom; what can be opened from it.

use libfabric_sys as sys;

use crate::rig::*;

#[test]
fn the_node_has_its_devices() {
    alone("offers::the_node_has_its_devices", &[("FAKE_EFA_NICS", "3")], |fake| {
        assert_eq!(fake.library.version(), sys::Version { major: 2, minor: 4 });
        assert_eq!(fake.library.strerror(sys::FI_EOVERRUN), "queue has been overrun");
        let list = fake.info();
        assert_eq!(list.all().len(), 3);
        for (index, info) in list.all().into_iter().enumerate() {
            // SAFETY: the library's, with all attributes.
            let (nic, domain, fabric, tx, ep) = unsafe {
                (&*info.nic, &*info.domain_attr, &*info.fabric_attr, &*info.tx_attr, &*info.ep_attr)
            };
            // SAFETY: as before.
            let (device, bus, link) =
                unsafe { (&*nic.device_attr, &*nic.bus_attr, &*nic.link_attr) };
            assert_eq!(read(device.name), format!("rdmap{index}s0"));
            assert_eq!(read(domain.name), format!("rdmap{index}s0-rdm"));
            assert_eq!((bus.bus_type, usize::from(bus.attr.bus_id)), (sys::FI_BUS_PCI, index));
            assert_eq!((link.speed, link.state), (100_000_000_000, sys::FI_LINK_UP));
            assert_eq!(
                (read(fabric.name), read(fabric.prov_name)),
                ("efa-direct".into(), "efa".into())
            );
            assert_eq!(info.mode, sys::FI_CONTEXT2);
            assert_eq!(
                (domain.cq_data_size, domain.mr_key_size, domain.av_type),
                (4, 4, sys::FI_AV_TABLE)
            );
            assert_eq!(
                (domain.threading, domain.data_progress),
                (sys::FI_THREAD_SAFE, sys::FI_PROGRESS_AUTO)
            );
            assert_eq!((tx.size, tx.iov_limit, tx.rma_iov_limit, tx.msg_order), (64, 1, 1, 0));
            assert_eq!(
                (ep.type_, ep.max_msg_size, info.addr_format),
                (sys::FI_EP_RDM, 1 << 20, sys::FI_ADDR_EFA)
            );
            assert_ne!(info.caps & sys::FI_SOURCE, 0);
            // SAFETY: the info is the library's, and so is its copy.
            unsafe {
                let copy = fake.library.dupinfo(info);
                assert!((*copy).next.is_null());
                assert_eq!(read((*(*copy).domain_attr).name), read(domain.name));
                assert_eq!(read((*(*(*copy).nic).device_attr).name), read(device.name));
                fake.library.freeinfo(copy);
            }
        }
        fake.broken(&[]);
    });
}

#[test]
fn an_offer_is_for_who_can_use_it() {
    type Change = fn(&mut sys::fi_info);
    let refused: &[(&str, Change)] = &[
        ("no FI_CONTEXT2", |hints| hints.mode = 0),
        ("another mode only", |hints| hints.mode = sys::FI_CONTEXT),
        ("no FI_MR_LOCAL", |hints| domain(hints).mr_mode &= !sys::FI_MR_LOCAL),
        ("no FI_MR_VIRT_ADDR", |hints| domain(hints).mr_mode &= !sys::FI_MR_VIRT_ADDR),
        ("no FI_MR_ALLOCATED", |hints| domain(hints).mr_mode &= !sys::FI_MR_ALLOCATED),
        ("no FI_MR_PROV_KEY", |hints| domain(hints).mr_mode &= !sys::FI_MR_PROV_KEY),
        ("8 bytes of data", |hints| domain(hints).cq_data_size = 8),
        ("FI_HMEM", |hints| hints.caps |= sys::FI_HMEM),
        ("FI_TAGGED", |hints| hints.caps |= sys::FI_TAGGED),
        ("FI_RMA_EVENT", |hints| hints.caps |= sys::FI_RMA_EVENT),
        ("FI_EP_MSG", |hints| endpoint(hints).type_ = sys::FI_EP_MSG),
        ("two buffers", |hints| sending(hints).rma_iov_limit = 2),
        ("socket addresses", |hints| hints.addr_format = sys::FI_SOCKADDR_IN),
        ("an order", |hints| sending(hints).msg_order = sys::FI_ORDER_WAW),
        ("FI_DELIVERY_COMPLETE", |hints| sending(hints).op_flags = sys::FI_DELIVERY_COMPLETE),
        ("a deep queue", |hints| sending(hints).size = 65),
        ("fabric efa", |hints| name_fabric(hints, text("efa"))),
        ("provider tcp", |hints| fabric(hints).prov_name = text("tcp")),
        ("no such device", |hints| domain(hints).name = text("rdmap4s0-rdm")),
    ];
    alone("offers::an_offer_is_for_who_can_use_it", &[], |fake| {
        for (what, change) in refused {
            let result = fake.getinfo(API, Some(&fake.hints(change))).map(|_| ());
            assert_eq!(result, Err(sys::FI_ENODATA), "{what}");
        }
        let granted: &[(&str, usize, Change)] = &[
            ("everything as usual", 4, |_| {}),
            ("more modes than it needs", 4, |hints| {
                hints.mode |= sys::FI_CONTEXT | sys::FI_MSG_PREFIX
            }),
            ("more registration modes", 4, |hints| domain(hints).mr_mode |= sys::FI_MR_HMEM),
            ("one device", 1, |hints| domain(hints).name = text("rdmap3s0-rdm")),
        ];
        for (what, count, change) in granted {
            assert_eq!(
                fake.getinfo(API, Some(&fake.hints(change))).unwrap().all().len(),
                *count,
                "{what}"
            );
        }
        fake.broken(&[]);
    });
}

#[test]
fn receives_for_data_are_as_the_hints_say() {
    alone("offers::receives_for_data_are_as_the_hints_say", &[], |fake| {
        let with = |bit| {
            fake.getinfo(API, Some(&fake.hints(|hints| hints.mode |= bit))).unwrap().first().mode
        };
        assert_eq!(with(0), sys::FI_CONTEXT2);
        assert_eq!(with(sys::FI_RX_CQ_DATA), sys::FI_CONTEXT2 | sys::FI_RX_CQ_DATA);
        let null = fake.getinfo(API, None).unwrap();
        assert_eq!(
            (null.all().len(), null.first().mode),
            (4, sys::FI_CONTEXT2 | sys::FI_RX_CQ_DATA)
        );
        fake.broken(&[]);
    });
}

#[test]
fn a_device_without_unsolicited_receives_is_for_who_posts_them() {
    let name = "offers::a_device_without_unsolicited_receives_is_for_who_posts_them";
    alone(name, &[("FAKE_EFA_UNSOLICITED", "0")], |fake| {
        assert_eq!(fake.getinfo(API, Some(&fake.hints(|_| {}))).map(|_| ()), Err(sys::FI_ENODATA));
        let hints = fake.hints(|hints| hints.mode |= sys::FI_RX_CQ_DATA);
        assert!(fake.getinfo(API, Some(&hints)).is_ok());
        let messages =
            fake.getinfo(API, Some(&fake.hints(|hints| hints.caps = sys::FI_MSG))).unwrap();
        // SAFETY: the library's, with all attributes.
        let max = unsafe { (*messages.first().ep_attr).max_msg_size };
        assert_eq!((messages.first().caps & sys::FI_RMA, max), (0, 8192));
        fake.broken(&[]);
    });
}

#[test]
fn the_version_asked_for_matters() {
    alone("offers::the_version_asked_for_matters", &[], |fake| {
        let ask = |major, minor| {
            fake.getinfo(sys::FI_VERSION(major, minor), Some(&fake.hints(|_| {}))).map(|info| {
                // SAFETY: the library's, with all attributes.
                unsafe { (*info.first().fabric_attr).api_version }
            })
        };
        assert_eq!(ask(1, 18), Ok(sys::FI_VERSION(1, 18)));
        assert_eq!(ask(2, 4), Ok(sys::FI_VERSION(2, 4)));
        assert_eq!(ask(1, 17), Err(sys::FI_ENODATA));
        assert_eq!(ask(2, 5), Err(sys::FI_ENOSYS));
    });
}

#[test]
fn both_fabrics_are_offered_if_there_are_both() {
    let name = "offers::both_fabrics_are_offered_if_there_are_both";
    alone(name, &[("FAKE_EFA_FABRICS", "efa-direct,efa"), ("FAKE_EFA_NICS", "1")], |fake| {
        let hints = fake.hints(|hints| name_fabric(hints, std::ptr::null_mut()));
        let list = fake.getinfo(API, Some(&hints)).unwrap();
        // SAFETY: the library's, with all attributes.
        let names: Vec<_> =
            list.all().iter().map(|info| unsafe { read((*info.fabric_attr).name) }).collect();
        assert_eq!(names, ["efa-direct", "efa"]);
        assert_eq!((list.all()[0].mode, list.all()[1].mode), (sys::FI_CONTEXT2, 0));
    });
}

#[test]
fn a_wrong_environment_is_refused() {
    alone("offers::a_wrong_environment_is_refused", &[("FAKE_EFA_NICS", "many")], |fake| {
        assert_eq!(fake.getinfo(API, None).map(|_| ()), Err(sys::FI_EINVAL));
    });
}

#[test]
fn options_are_as_documented() {
    alone("offers::options_are_as_documented", &[("FAKE_EFA_MAX_RMA", "4096")], |fake| {
        let node = Node::open(fake, fake.info());
        let ep = node.ep();
        let size = |option| {
            let (mut value, mut len) = (0_usize, size_of::<usize>());
            // SAFETY: there is room for `len` bytes.
            fine(unsafe {
                sys::fi_getopt(
                    ep,
                    sys::FI_OPT_ENDPOINT,
                    option,
                    (&raw mut value).cast(),
                    &raw mut len,
                )
            });
            value
        };
        assert_eq!(size(sys::FI_OPT_MAX_RMA_SIZE), 4096);
        assert_eq!(size(sys::FI_OPT_MAX_MSG_SIZE), 8192);
        assert_eq!(size(sys::FI_OPT_INJECT_RMA_SIZE), 0);
        let (mut value, mut len) = (7_u8, 1);
        // SAFETY: as before.
        let mut get = |option| unsafe {
            let result = sys::fi_getopt(
                ep,
                sys::FI_OPT_ENDPOINT,
                option,
                (&raw mut value).cast(),
                &raw mut len,
            );
            (result, value)
        };
        assert_eq!(get(sys::FI_OPT_EFA_EMULATED_WRITE), (0, 0));
        assert_eq!(get(sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV), (0, 1));
        assert_eq!(get(12345).0, -sys::FI_ENOPROTOOPT);
        let set = |option, value: u8| {
            // SAFETY: one byte.
            unsafe {
                sys::fi_setopt(ep, sys::FI_OPT_ENDPOINT, option, (&raw const value).cast(), 1)
            }
        };
        assert_eq!(set(sys::FI_OPT_CUDA_API_PERMITTED, 0), 0);
        assert_eq!(set(sys::FI_OPT_SHARED_MEMORY_PERMITTED, 0), 0);
        assert_eq!(set(sys::FI_OPT_EFA_USE_DEVICE_RDMA, 1), 0);
        assert_eq!(set(sys::FI_OPT_EFA_USE_DEVICE_RDMA, 0), -sys::FI_EOPNOTSUPP);
        assert_eq!(set(sys::FI_OPT_EFA_WRITE_IN_ORDER_ALIGNED_128_BYTES, 1), -sys::FI_EOPNOTSUPP);
        assert_eq!(set(sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, 0), -sys::FI_EOPNOTSUPP);
        assert_eq!(set(12345, 0), -sys::FI_ENOPROTOOPT);
        fake.broken(&[]);
        let side = node.side(16);
        let one = 1_u8;
        let option = sys::FI_OPT_CUDA_API_PERMITTED;
        // SAFETY: one byte.
        let late = unsafe {
            sys::fi_setopt(side.ep, sys::FI_OPT_ENDPOINT, option, (&raw const one).cast(), 1)
        };
        assert_eq!(late, -sys::FI_EINVAL);
        fake.broken(&["wrong state"]);
        // SAFETY: it is open.
        fine(unsafe { sys::fi_close(&raw mut (*ep).fid) });
        side.close();
        node.close();
    });
}

#[test]
fn the_option_can_say_that_writes_are_emulated() {
    let name = "offers::the_option_can_say_that_writes_are_emulated";
    alone(name, &[("FAKE_EFA_EMULATED_WRITE", "1")], |fake| {
        let node = Node::open(fake, fake.info());
        let (mut value, mut len, option) = (7_u8, 1, sys::FI_OPT_EFA_EMULATED_WRITE);
        // SAFETY: there is room for one byte.
        let result = unsafe {
            sys::fi_getopt(
                node.ep(),
                sys::FI_OPT_ENDPOINT,
                option,
                (&raw mut value).cast(),
                &raw mut len,
            )
        };
        assert_eq!((result, value), (0, 1));
    });
}
