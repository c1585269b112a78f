import sys, torch, time, warnings, inspect, json
warnings.filterwarnings("ignore")
import torch.nn.functional as F
import transformers as T
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
from megacp.sdpa.context import context_parallel
from megacp.sdpa.transformers import register_with_transformers
from megacp.sdpa.loop import sum_gradients, shift_labels
from megacp.distributed.collectives import all_reduce
from tests.ranks import run_ranks, grid
T.logging.set_verbosity_error()
SMALL=dict(vocab_size=61,hidden_size=32,d_model=32,n_embd=32,dim=32,intermediate_size=48,ffn_dim=48,n_inner=48,ffn_hidden_size=48,d_ff=48,decoder_ffn_dim=48,encoder_ffn_dim=48,
 num_hidden_layers=2,n_layer=2,n_layers=2,num_layers=2,decoder_layers=2,encoder_layers=2,num_attention_heads=4,n_head=4,n_heads=4,num_heads=4,decoder_attention_heads=4,encoder_attention_heads=4,
 num_key_value_heads=2,num_kv_heads=2,head_dim=8,max_position_embeddings=128,n_positions=128,max_seq_len=128,
 num_experts=4,num_local_experts=4,n_routed_experts=4,moe_num_experts=4,num_experts_per_tok=2,moe_intermediate_size=24,shared_expert_intermediate_size=24,n_group=1,topk_group=1,n_shared_experts=1,moe_k=2,
 q_lora_rank=16,kv_lora_rank=16,qk_nope_head_dim=8,qk_rope_head_dim=8,v_head_dim=8,rotary_dim=4,
 attention_dropout=0.0,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,hidden_dropout=0.0,dropout=0.0,activation_dropout=0.0,attention_probs_dropout_prob=0.0,hidden_dropout_prob=0.0,residual_dropout=0.0,embedding_dropout=0.0,layerdrop=0.0,
 pad_token_id=0,bos_token_id=1,eos_token_id=2,is_decoder=True,use_cache=False,output_router_logits=False,router_jitter_noise=0.0,rope_theta=10000.0,pad_token=0,sliding_window=None,mlp_hidden_size=48,expert_dim=24,word_embed_proj_dim=32,embedding_size=32)
def build(kind, attn):
    cls=getattr(T, NAMES[kind]); C=cls.config_class
    d=C()
    kw={k:v for k,v in SMALL.items() if hasattr(d,k)}
    if getattr(d,"sliding_window","x") is None: kw.pop("sliding_window",None)
    try: c=C(**kw)
    except Exception:
        kw.pop("sliding_window",None); c=C(**kw)
    torch.manual_seed(1)
    c._attn_implementation=attn
    m=cls._from_config(c, attn_implementation=attn).double()
    return m.eval()
S=48
def toks():
    ids=torch.randint(3,61,(2,S),generator=torch.Generator().manual_seed(2)); pos=torch.arange(S).repeat(2,1)
    return ids,pos
def loss_of(m,ids,pos,lab,n):
    logits=m(input_ids=ids,position_ids=pos,use_cache=False).logits if "position_ids" in inspect.signature(m.forward).parameters else m(input_ids=ids,use_cache=False).logits
    return F.cross_entropy(logits.flatten(0,1).double(),lab.flatten(),reduction="sum")/n
def ref(kind):
    m=build(kind,"sdpa"); ids,pos=toks(); lab=shift_labels(ids); l=loss_of(m,ids,pos,lab,(lab!=-100).sum()); l.backward()
    return l.item(),{k:p.grad for k,p in m.named_parameters() if p.grad is not None}, sum(p.numel() for p in m.parameters())
def on(rank,world,kind):
    register_with_transformers()
    try: m=build(kind,"megacp")
    except ValueError as e: return "refused at load: "+str(e)[:150]
    ids,pos=toks(); lab=shift_labels(ids); n=(lab!=-100).sum(); axis=grid(cp=world).cp
    try:
        with context_parallel(axis,buffers=[ids,pos,lab],buffer_seq_dims=[1,1,1],transport="kv_exchange",layout="zigzag",model=m):
            l=loss_of(m,ids,pos,lab,n); l.backward()
    except ValueError as e: return "refused: "+str(e)[:300]
    sum_gradients(m.parameters(),axis)
    return all_reduce(l.detach(),axis).item(),{k:p.grad for k,p in m.named_parameters() if p.grad is not None}
if __name__=="__main__":
    kinds=sys.argv[1:] or sorted(NAMES)
    for k in kinds:
        t=time.time()
        try:
            l,g,n=ref(k)
        except Exception as e:
            print(f"{k:28} NOBUILD {type(e).__name__} {str(e)[:110]!r}",flush=True); continue
        try: r=run_ranks(on,2,k,timeout=40)
        except Exception as e:
            msg=str(e).strip().splitlines(); print(f"{k:28} CRASH {msg[-1][:150]!r}",flush=True); continue
        if isinstance(r[0],str): print(f"{k:28} {r[0]!r} {'SAME' if r[0]==r[1] else 'DIFFER'}",flush=True); continue
        w=max(((r[0][1][q]-x).abs().max()/x.abs().max().clamp(min=1e-12)).item() if q in r[0][1] else 9 for q,x in g.items())
        print(f"{k:28} loss {abs(r[0][0]-l)/l:.1e} grad {w:.1e} n={n} {time.time()-t:.1f}s",flush=True)
